"""What a training measures about itself: a profile of its steps, its speed, its FLOPs."""
