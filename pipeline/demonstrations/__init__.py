"""What `evenkeel sft` trains on: rows of the user's own, as tokens.

conversation  which text of a conversation, as the chat template writes it, the model itself says
turn_end      the token by which the template ends an answer, where no server stops at it
rows          from the rows of a file to tokens, with what is learned of them
"""
