"""Learning while serving: the stage's loop, learners, versions and figures."""
