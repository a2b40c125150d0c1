"""Call the user's code (reward functions, tools and environments) in this process or in worker processes."""
