"""Tools for the process: environment variables, imports by path, registered extensions, memory, checks of Hub names."""
