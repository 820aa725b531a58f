
B	head_sinkJÀ­Ø=n@°5