/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A connection until its queue pair is in operation: what cm.c and listen.c share. */
#ifndef IWARP_RNIC_CM_H
#define IWARP_RNIC_CM_H

#include <net/sock.h>
#include <rdma/iw_cm.h>

#include "rnic.h"

struct listener;

struct rnic_connection {
	/* A turn: does what can be done now. On `rnic_order`. */
	struct work_struct work;
	/* Queues a turn when a time limit is over. */
	struct timer_list timer;
	struct socket *socket;
	/* The socket's own, while it is watched. */
	void (*data_ready)(struct sock *sk);
	void (*state_change)(struct sock *sk);
	struct rk_mpa *mpa;
	/* Of an initiator. */
	struct iw_cm_id *id;
	struct rnic_qp *qp;
	bool requested;
	/* Of a responder, until iw_cm knows of it. */
	struct listener *listener;
	struct list_head entry;
	/* It has to make room for another one if its request has not come. */
	bool pushed_out;
};

/* The parameters of an initiator or a responder, as its program wants them. */
struct rk_mpa_params rnic_mpa_params(u32 ird, u32 ord);
size_t rnic_address_size(const struct sockaddr_storage *address);
int rnic_make_socket(struct ib_device *base, const struct sockaddr_storage *address,
		     struct socket **socket);

/* Makes a connection without a socket. `mpa` becomes part of it, or is freed. There may have been no memory for it either (NULL). */
struct rnic_connection *rnic_connection_new(struct rk_mpa *mpa, work_func_t turn);
void rnic_connection_free(struct rnic_connection *connection);

void rnic_watch(struct rnic_connection *connection, int idle);
void rnic_unwatch(struct rnic_connection *connection);
void rnic_set_timer(struct rnic_connection *connection);
int rnic_in_time(struct rnic_connection *connection, int result);

int rnic_read_frame(struct rnic_connection *connection, struct rk_mpa_peer *peer);
void rnic_tell_of(const struct rnic_connection *connection, const struct rk_mpa_peer *peer,
		  struct iw_cm_event *event);

#endif
