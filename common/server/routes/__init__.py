"""The routes, a module for each family of them."""
