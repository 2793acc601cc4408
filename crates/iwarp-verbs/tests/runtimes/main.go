// Runs the C program unmapped in a Go program, whose runtime turns faults into panics.
package main

/*
#include <stdio.h>

int unmapped_main(int count, char **words);

static int run(char *face)
{
	char *words[] = { "unmapped", face, "runtime", 0 };
	int code = unmapped_main(3, words);

	fflush(stdout);
	return code;
}
*/
import "C"

import (
	"os"
	"sync"
)

func fault() {
	defer func() {
		if recover() == nil {
			panic("no fault")
		}
	}()
	var nothing *int
	*nothing = 1
}

func main() {
	fault()
	var others sync.WaitGroup
	done := make(chan struct{})
	for i := 0; i < 2; i++ {
		others.Add(1)
		go func() {
			defer others.Done()
			for {
				select {
				case <-done:
					return
				default:
					fault()
				}
			}
		}()
	}
	code := C.run(C.CString(os.Args[1]))
	close(done)
	others.Wait()
	fault()
	os.Exit(int(code))
}
