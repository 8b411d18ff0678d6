"""The OpenAI-compatible HTTP server over an AsyncEngine; `app.create_app` is its entry."""
