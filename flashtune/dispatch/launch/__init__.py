"""From a variant to a launch through the driver: host code recorded once, parameters written at each call."""
