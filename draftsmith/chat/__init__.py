"""`draftsmith chat`: a conversation in the terminal that shows which tokens were drafted."""
