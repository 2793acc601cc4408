/* Error checks that all programs of the course share. */
#ifndef LESSON_H
#define LESSON_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <infiniband/verbs.h>

/* Ends the program if a call has failed. The ibv_ functions return an error number; the rdma_
 * functions return -1 and set errno. */
static inline void check(int result, const char *call)
{
	if (result == 0)
		return;
	fprintf(stderr, "%s: %s\n", call, strerror(result > 0 ? result : errno));
	exit(1);
}

/* Ends the program if a call has returned no object; such calls set errno. Returns the object. */
static inline void *created(void *object, const char *call)
{
	check(object ? 0 : -1, call);
	return object;
}

/* Ends the program unless exactly one completion was returned, of a request that succeeded. */
static inline void succeeded(int count, const struct ibv_wc *wc)
{
	check(count == 1 ? 0 : -1, "waiting for a completion");
	if (wc->status == IBV_WC_SUCCESS)
		return;
	fprintf(stderr, "a request failed: %s\n", ibv_wc_status_str(wc->status));
	exit(1);
}

/* Polls the queue until it has a completion, and returns it. */
static inline struct ibv_wc completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int count;

	do
		count = ibv_poll_cq(cq, 1, &wc);
	while (count == 0);
	succeeded(count, &wc);
	return wc;
}

#endif
