"""The page at `GET /`: plain HTML, CSS and modules of JavaScript, with no build step and nothing from outside."""
