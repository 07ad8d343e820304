"""What torch keeps under `_experimental`, under the same paths."""
