"""Signals, time limits, stop requests and hang detection while a training runs."""
