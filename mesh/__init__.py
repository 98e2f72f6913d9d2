"""What two or more services share. Imports no service."""
