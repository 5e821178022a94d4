"""Arrays from one mesh to another, whatever the two meshes and layouts are."""
