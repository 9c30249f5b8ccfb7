"""What is in force, and which plans may serve a call under it, best first."""
