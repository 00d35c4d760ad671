"""Checks of what a release would contain. They are tools for maintainers, not tests: `make release-check`."""
