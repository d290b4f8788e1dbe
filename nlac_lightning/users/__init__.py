"""Users that an agent talks to: scripted, a local model, or any OpenAI-compatible endpoint."""
