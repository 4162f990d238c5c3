"""Files that are whole or absent: atomic publishing, checksums, checked opening, memory maps, JSON documents."""
