
B	head_sinkJ(9== 8