"""Tools for the process: environment variables, imports by path, extensions, memory, checks of Hub names."""
