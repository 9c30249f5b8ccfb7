"""What is tried next: a problem's space, samplers over it, and the study that remembers what became of each candidate."""
