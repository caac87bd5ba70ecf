"""Many runs: a ledger of what came out, places where runs can be executed, and the loop that brings them together."""
