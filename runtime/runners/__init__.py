"""What runs steps: a folder a target."""
