"""A fleet of boards that train one model, each within its own budget: a Flower app."""
