"""Copies of snapshots on other nodes and local disks, and how a restart gets them back."""
