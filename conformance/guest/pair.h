/* Two queue pairs of this process that are connected with each other. */
#ifndef PAIR_H
#define PAIR_H

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void must(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static inline struct rdma_cm_id *event(struct rdma_event_channel *channel,
				       enum rdma_cm_event_type wanted)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	must(rdma_get_cm_event(channel, &event), "an event");
	must(event->event != wanted, rdma_event_str(event->event));
	id = event->id;
	rdma_ack_cm_event(event);
	return id;
}

/* `ours` has the events of `writer`, `theirs` the events of the other two. */
struct pair {
	struct rdma_event_channel *ours, *theirs;
	struct rdma_cm_id *listener, *writer, *target;
};

/* Listens, and resolves the address. Afterwards `writer` has a device. */
static inline struct pair begin_pair(struct sockaddr_in *address)
{
	struct pair pair = { .ours = rdma_create_event_channel(),
			     .theirs = rdma_create_event_channel() };

	must(!pair.ours || !pair.theirs, "a channel");
	must(rdma_create_id(pair.theirs, &pair.listener, NULL, RDMA_PS_TCP) ||
		     rdma_bind_addr(pair.listener, (struct sockaddr *)address) ||
			     rdma_listen(pair.listener, 1), "listening");
	must(rdma_create_id(pair.ours, &pair.writer, NULL, RDMA_PS_TCP) ||
		     rdma_resolve_addr(pair.writer, NULL, (struct sockaddr *)address, 2000),
			     "the address");
	event(pair.ours, RDMA_CM_EVENT_ADDR_RESOLVED);
	must(rdma_resolve_route(pair.writer, 2000), "the route");
	event(pair.ours, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return pair;
}

/* Creates both queue pairs and connects them. */
static inline void join_pair(struct pair *pair, struct ibv_qp_init_attr writer,
			     struct ibv_qp_init_attr target)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

	must(rdma_create_qp(pair->writer, NULL, &writer), "a queue pair");
	must(rdma_connect(pair->writer, &param), "connecting");
	pair->target = event(pair->theirs, RDMA_CM_EVENT_CONNECT_REQUEST);
	must(rdma_create_qp(pair->target, NULL, &target), "the other queue pair");
	must(rdma_accept(pair->target, &param), "accepting");
	event(pair->theirs, RDMA_CM_EVENT_ESTABLISHED);
	event(pair->ours, RDMA_CM_EVENT_ESTABLISHED);
}

static inline void take_events(struct rdma_event_channel *channel)
{
	struct pollfd ready = { channel->fd, POLLIN, 0 };
	struct rdma_cm_event *left;

	while (poll(&ready, 1, 0) > 0 && !rdma_get_cm_event(channel, &left))
		rdma_ack_cm_event(left);
}

static inline void end_queue_pairs(struct pair *pair)
{
	rdma_destroy_qp(pair->writer);
	rdma_destroy_qp(pair->target);
}

/* An identifier can be destroyed only after its events are acknowledged. */
static inline void end_pair(struct pair *pair)
{
	take_events(pair->ours);
	take_events(pair->theirs);
	must(rdma_destroy_id(pair->writer) || rdma_destroy_id(pair->target) ||
	     rdma_destroy_id(pair->listener), "the end of the identifiers");
	rdma_destroy_event_channel(pair->ours);
	rdma_destroy_event_channel(pair->theirs);
}

#endif
