"""What the drafters of a config will be worth, from trainings on small parts of its data."""
