"""Forms written as grammars in llguidance's Lark."""
