"""Where bins come from, behind one interface: shards, a plan over a token store, or several of these end to end."""
