"""One file for each family of models and its way of writing calls."""
