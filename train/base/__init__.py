"""What all parts of a training use: stages, configs, the launcher, the console, tracking."""
