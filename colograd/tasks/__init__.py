"""Tasks to try a machine with: `quickstart` (a model and sums of digits), `calculator` (products, with a tool),
`colours` (pictures, with a model of random weights)."""
