/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Tracepoints (iwarp:*): connections, Terminates, and faults that end a stream. kernel/README.md
 * shows how to use them.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM iwarp

#if !defined(IWARP_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define IWARP_TRACE_H

#include <linux/in6.h>
#include <linux/tracepoint.h>

#include "rnic.h"

TRACE_DEFINE_ENUM(RK_BLAME_PEER);
TRACE_DEFINE_ENUM(RK_BLAME_PEER_TERMINATED);
TRACE_DEFINE_ENUM(RK_BLAME_LOCAL);
TRACE_DEFINE_ENUM(RK_BLAME_TRANSPORT);

/* The set-up of a connection has ended. */
TRACE_EVENT(connect,
	TP_PROTO(const struct rnic_qp *qp, bool initiator, const struct sockaddr_storage *local,
		 const struct sockaddr_storage *remote, int status),
	TP_ARGS(qp, initiator, local, remote, status),
	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__array(u8, local, sizeof(struct sockaddr_in6))
		__array(u8, remote, sizeof(struct sockaddr_in6))
		__field(u32, qp)
		__field(bool, initiator)
		__field(int, status)
	),
	TP_fast_assign(
		strscpy(__entry->device, dev_name(&qp->base.device->dev), IB_DEVICE_NAME_MAX);
		memcpy(__entry->local, local, sizeof(struct sockaddr_in6));
		memcpy(__entry->remote, remote, sizeof(struct sockaddr_in6));
		__entry->qp = qp->base.qp_num;
		__entry->initiator = initiator;
		__entry->status = status;
	),
	TP_printk("device=%s qp=%u role=%s local=%pISpc remote=%pISpc status=%d",
		  __entry->device, __entry->qp, __entry->initiator ? "initiator" : "responder",
		  __entry->local, __entry->remote, __entry->status)
);

/* The stream has ended after a Terminate. */
TRACE_EVENT(terminate,
	TP_PROTO(const struct rnic_qp *qp, const struct rk_fault *fault),
	TP_ARGS(qp, fault),
	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp)
		__field(bool, sent)
		__field(u8, layer)
		__field(u8, etype)
		__field(u8, code)
	),
	TP_fast_assign(
		strscpy(__entry->device, dev_name(&qp->base.device->dev), IB_DEVICE_NAME_MAX);
		__entry->qp = qp->base.qp_num;
		__entry->sent = fault->blame == RK_BLAME_PEER;
		__entry->layer = fault->layer;
		__entry->etype = fault->etype;
		__entry->code = fault->code;
	),
	TP_printk("device=%s qp=%u %s layer=%u etype=%u code=%u", __entry->device, __entry->qp,
		  __entry->sent ? "sent" : "received", __entry->layer, __entry->etype,
		  __entry->code)
);

/* The stream has ended with an error, after a Terminate or without one. */
TRACE_EVENT(fault,
	TP_PROTO(const struct rnic_qp *qp, const struct rk_fault *fault, bool reset),
	TP_ARGS(qp, fault, reset),
	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp)
		__field(u32, blame)
		__field(u8, layer)
		__field(u8, etype)
		__field(u8, code)
		__field(bool, reset)
	),
	TP_fast_assign(
		strscpy(__entry->device, dev_name(&qp->base.device->dev), IB_DEVICE_NAME_MAX);
		__entry->qp = qp->base.qp_num;
		__entry->blame = fault->blame;
		__entry->layer = fault->layer;
		__entry->etype = fault->etype;
		__entry->code = fault->code;
		__entry->reset = reset;
	),
	TP_printk("device=%s qp=%u cause=%s layer=%u etype=%u code=%u reset=%d", __entry->device,
		  __entry->qp,
		  __print_symbolic(__entry->blame,
				   { RK_BLAME_PEER, "peer" },
				   { RK_BLAME_PEER_TERMINATED, "peer-terminated" },
				   { RK_BLAME_LOCAL, "local-request" },
				   { RK_BLAME_TRANSPORT, "connection-lost" }),
		  __entry->layer, __entry->etype, __entry->code, __entry->reset)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH src
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
