"""How a value lies on a mesh, how it gets from one layout to another, and which layouts the user allows."""
