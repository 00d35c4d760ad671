"""Handles signals, time limits, stop requests and hang detection during training."""
