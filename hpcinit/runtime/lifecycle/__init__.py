"""What a training meets between its start and its end: signals, a time limit, others who ask it to stop."""
