"""Where attention's time and bytes go: accounting, roofline, measurements and their pictures."""
