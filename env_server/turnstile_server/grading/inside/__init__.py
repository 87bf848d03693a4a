"""Programs that run inside a grading sandbox, on the image's Python. Nothing here imports anything of
Turnstile."""
