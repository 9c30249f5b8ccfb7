"""Profile of attention's time and bytes: accounting, roofline, measurements and plots."""
