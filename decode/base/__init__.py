"""What every package uses: errors, registries, the files of a drafter, devices and dtypes."""
