"""The grammar behind the sample chats: small topics whose answers follow from their questions."""
