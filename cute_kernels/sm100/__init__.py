"""SM100: the tcgen05 mainloop and what is composed around it."""
