"""Users for dialogue environments: ``scripted``, and ``language_model`` (local or an endpoint)."""
