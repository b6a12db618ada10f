"""A model of six numbers, as an app that Flower deploys."""
