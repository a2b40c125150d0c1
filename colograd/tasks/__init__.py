"""Tasks to try a machine with: `quickstart` (a model and sums of digits), `calculator` (products, with a tool)."""
