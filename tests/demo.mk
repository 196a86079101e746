#help   demo           a conversion from end to end, on a checkpoint of 0.4 MB
demo: all
	@sh tests/demo.sh $(B)

.PHONY: demo
