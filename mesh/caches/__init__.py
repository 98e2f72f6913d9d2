"""Caches in Valkey that two services share: bodies of tweets and their counts, and viewers' versions."""

from importlib import resources

LIBRARY = (resources.files(__name__) / "caches.lua").read_text()
"""The function library for `mesh.valkey.Valkey(libraries=…)`."""
