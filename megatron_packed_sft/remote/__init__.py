"""Everything that knows about URLs: object stores, uploads, and the cache of a node. Local paths never come here."""
