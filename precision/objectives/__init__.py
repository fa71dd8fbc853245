"""One file an objective; `base` says what each takes, returns and states about itself."""
