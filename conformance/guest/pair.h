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

static inline void fail_if(int bad, const char *what)
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

	fail_if(rdma_get_cm_event(channel, &event), "an event");
	fail_if(event->event != wanted, rdma_event_str(event->event));
	id = event->id;
	rdma_ack_cm_event(event);
	return id;
}

static inline struct rdma_cm_id *listen_at(struct rdma_event_channel *channel,
					   struct sockaddr_in *address, int backlog)
{
	struct rdma_cm_id *listener;

	fail_if(!channel, "an event channel");
	fail_if(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) ||
			rdma_bind_addr(listener, (struct sockaddr *)address) ||
				rdma_listen(listener, backlog), "listening");
	return listener;
}

/* Events of `writer` arrive on channel `ours`, events of `listener` and `target` on `theirs`. */
struct pair {
	struct rdma_event_channel *ours, *theirs;
	struct rdma_cm_id *listener, *writer, *target;
};

/* Creates the listener, and resolves the address and route of `writer`, which then has a device. */
static inline struct pair begin_pair(struct sockaddr_in *address)
{
	struct pair pair = { .ours = rdma_create_event_channel(),
			     .theirs = rdma_create_event_channel() };

	fail_if(!pair.ours, "an event channel");
	pair.listener = listen_at(pair.theirs, address, 1);
	fail_if(rdma_create_id(pair.ours, &pair.writer, NULL, RDMA_PS_TCP) ||
			rdma_resolve_addr(pair.writer, NULL, (struct sockaddr *)address, 2000),
				"resolving the address");
	event(pair.ours, RDMA_CM_EVENT_ADDR_RESOLVED);
	fail_if(rdma_resolve_route(pair.writer, 2000), "resolving the route");
	event(pair.ours, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return pair;
}

/* Creates both queue pairs and connects them. */
static inline void join_pair(struct pair *pair, struct ibv_qp_init_attr writer,
			     struct ibv_qp_init_attr target)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

	fail_if(rdma_create_qp(pair->writer, NULL, &writer), "a queue pair");
	fail_if(rdma_connect(pair->writer, &param), "connecting");
	pair->target = event(pair->theirs, RDMA_CM_EVENT_CONNECT_REQUEST);
	fail_if(rdma_create_qp(pair->target, NULL, &target), "the second queue pair");
	fail_if(rdma_accept(pair->target, &param), "accepting");
	event(pair->theirs, RDMA_CM_EVENT_ESTABLISHED);
	event(pair->ours, RDMA_CM_EVENT_ESTABLISHED);
}

static inline void drain_events(struct rdma_event_channel *channel)
{
	struct pollfd ready = { channel->fd, POLLIN, 0 };
	struct rdma_cm_event *event;

	while (poll(&ready, 1, 0) > 0 && !rdma_get_cm_event(channel, &event))
		rdma_ack_cm_event(event);
}

static inline void destroy_queue_pairs(struct pair *pair)
{
	rdma_destroy_qp(pair->writer);
	rdma_destroy_qp(pair->target);
}

/* Acknowledges all pending events first: an identifier with open events cannot be destroyed. */
static inline void destroy_pair(struct pair *pair)
{
	drain_events(pair->ours);
	drain_events(pair->theirs);
	fail_if(rdma_destroy_id(pair->writer) || rdma_destroy_id(pair->target) ||
		rdma_destroy_id(pair->listener), "destroying the identifiers");
	rdma_destroy_event_channel(pair->ours);
	rdma_destroy_event_channel(pair->theirs);
}

#endif
