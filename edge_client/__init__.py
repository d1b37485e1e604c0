"""fedfit's SDK: everything a device needs to take part in a federation, and the maths that the coordinator shares."""

__version__ = "0.1.0"
