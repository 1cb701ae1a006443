# What delayed tasks wait in on RabbitMQ, for celery_native_delay, as its settings ask for it:
#
#     celery -A PROJ delay export --format terraform
#
# Tasks wait in these queues. Other settings make another set: add that beside this one, and take
# this one away, with its prevent_destroy, once `delay status` with the old settings shows it empty.

terraform {
  required_providers {
    rabbitmq = {
      source  = "cyrilgdn/rabbitmq"
      version = ">= 1.8"
    }
  }
}

variable "vhost" {
  description = "The virtual host, which is there already."
  type        = string
  default     = "shop/eu"
}

variable "namespace" {
  description = "First word of every name: native_delay_namespace of the app."
  type        = string
  default     = "celery_delay"
}

locals {
  space = "${var.namespace}.v1"
  set   = "${local.space}.6x125ms.f3.quorum"

  # A delay is a number of units of 125 ms: so many bits, most significant first.
  bits      = 6
  any_delay = join("", [for _ in range(local.bits) : "*."])

  # The delay levels. In each a message waits for `width` bits of its delay, from `bit` on, and
  # goes to `next`. A fused level has a queue for each value of its bits.
  levels = [
    { name = "level-00", bit = 0, width = 3, fused = true, next = "delivery" },
    { name = "level-03", bit = 3, width = 1, fused = false, next = "level-00" },
    { name = "level-04", bit = 4, width = 1, fused = false, next = "level-03" },
    { name = "level-05", bit = 5, width = 1, fused = false, next = "level-04" },
  ]

  level_queues = flatten([
    for level in local.levels : [
      for value in range(1, pow(2, level.width)) : {
        name   = level.fused ? format("%s-%x", level.name, value) : level.name
        value  = value
        bit    = level.bit
        ttl_ms = 125 * value * pow(2, level.bit)
        next   = level.next
      }
    ]
  ])

  # Where what has waited in higher levels arrives: nothing is above the highest.
  arrivals = slice(local.levels, 0, length(local.levels) - 1)

  exchanges = merge(
    {
      for level in local.arrivals : "${local.set}.${level.name}" => {
        type      = "topic"
        arguments = { "alternate-exchange" = "${local.space}.parked" }
      }
    },
    {
      for queue in local.level_queues : "${local.set}.${queue.name}.entry" => {
        type      = "fanout"
        arguments = {}
      }
    },
    {
      "${local.space}.parked"          = { type = "fanout", arguments = {} }
      "${local.set}.delivery"          = { type = "topic", arguments = { "alternate-exchange" = "${local.space}.parked" } }
      "${local.set}.lands.billing"     = { type = "fanout", arguments = {} }
      "${local.set}.lands.matching"    = { type = "fanout", arguments = {} }
      "${local.set}.lands.news"        = { type = "fanout", arguments = {} }
      "${local.set}.mirrored.billing"  = { type = "fanout", arguments = {} }
      "${local.set}.mirrored.celery"   = { type = "fanout", arguments = {} }
      "${local.set}.mirrored.matching" = { type = "fanout", arguments = {} }
      "${local.set}.mirrored.news"     = { type = "fanout", arguments = {} }
      "${local.set}.mirrored.shop"     = { type = "fanout", arguments = {} }
    },
  )

  queues = merge(
    {
      for queue in local.level_queues : "${local.set}.${queue.name}" => {
        "x-queue-type"           = "quorum"
        "x-message-ttl"          = queue.ttl_ms
        "x-dead-letter-exchange" = "${local.set}.${queue.next}"
        "x-queue-leader-locator" = "balanced"
        "x-dead-letter-strategy" = "at-least-once"
        "x-overflow"             = "reject-publish"
      }
    },
    {
      "${local.space}.parked" = {
        "x-queue-type"           = "quorum"
        "x-queue-leader-locator" = "balanced"
        "x-delivery-limit"       = 1000000
      }
      "${local.set}.landing-exchange.billing" = {
        "x-queue-type"           = "quorum"
        "x-queue-leader-locator" = "balanced"
        "x-message-ttl"          = 0
        "x-dead-letter-exchange" = "billing"
        "x-dead-letter-strategy" = "at-least-once"
        "x-overflow"             = "reject-publish"
      }
      "${local.set}.landing-exchange.matching" = {
        "x-queue-type"           = "quorum"
        "x-queue-leader-locator" = "balanced"
        "x-message-ttl"          = 0
        "x-dead-letter-exchange" = "matching"
        "x-dead-letter-strategy" = "at-least-once"
        "x-overflow"             = "reject-publish"
      }
      "${local.set}.landing-exchange.news" = {
        "x-queue-type"           = "quorum"
        "x-queue-leader-locator" = "balanced"
        "x-message-ttl"          = 0
        "x-dead-letter-exchange" = "news"
        "x-dead-letter-strategy" = "at-least-once"
        "x-overflow"             = "reject-publish"
      }
      "${local.set}.landing-queue.few" = {
        "x-queue-type"              = "quorum"
        "x-queue-leader-locator"    = "balanced"
        "x-message-ttl"             = 0
        "x-dead-letter-exchange"    = "${local.set}.delivery"
        "x-dead-letter-strategy"    = "at-least-once"
        "x-overflow"                = "reject-publish"
        "x-dead-letter-routing-key" = "0.0.0.0.0.0.%%q.few"
      }
    },
  )

  bindings = concat(
    # A message enters in front of the queue that it waits in first.
    [
      for queue in local.level_queues : {
        source      = "${local.set}.${queue.name}.entry"
        destination = "${local.set}.${queue.name}"
        type        = "queue"
        routing_key = ""
      }
    ],
    # From the exchange of a level straight to the next queue: that of the next bits that are set.
    flatten([
      for level in local.arrivals : [
        for queue in local.level_queues : {
          source      = "${local.set}.${level.name}"
          destination = "${local.set}.${queue.name}"
          type        = "queue"
          routing_key = join(".", concat(
            [for _ in range(local.bits - level.bit - level.width) : "*"],
            split("", format("%0${level.bit + level.width - queue.bit}b", queue.value)),
            [for _ in range(queue.bit) : "*"],
            ["#"],
          ))
        } if queue.bit <= level.bit
      ]
    ]),
    # And, when no bit is set any more, to its delivery.
    [
      for level in local.arrivals : {
        source      = "${local.set}.${level.name}"
        destination = "${local.set}.delivery"
        type        = "exchange"
        routing_key = join(".", concat(
          [for _ in range(local.bits - level.bit - level.width) : "*"],
          [for _ in range(level.bit + level.width) : "0"],
          ["#"],
        ))
      }
    ],
    [
      {
        source      = "${local.space}.parked"
        destination = "${local.space}.parked"
        type        = "queue"
        routing_key = ""
      },
      {
        source      = "${local.set}.delivery"
        destination = "${local.set}.landing-exchange.billing"
        type        = "queue"
        routing_key = "${local.any_delay}%%l.billing"
      },
      {
        source      = "${local.set}.delivery"
        destination = "${local.set}.landing-exchange.matching"
        type        = "queue"
        routing_key = "${local.any_delay}%%l.matching"
      },
      {
        source      = "${local.set}.delivery"
        destination = "${local.set}.landing-exchange.news"
        type        = "queue"
        routing_key = "${local.any_delay}%%l.news"
      },
      {
        source      = "${local.set}.delivery"
        destination = "celery"
        type        = "queue"
        routing_key = "${local.any_delay}%.celery"
      },
      {
        source      = "${local.set}.delivery"
        destination = "few"
        type        = "queue"
        routing_key = "${local.any_delay}%%q.few"
      },
      {
        source      = "${local.set}.delivery"
        destination = "${local.set}.landing-queue.few"
        type        = "queue"
        routing_key = "${local.any_delay}%.few"
      },
      {
        source      = "${local.set}.delivery"
        destination = "matched"
        type        = "queue"
        routing_key = "${local.any_delay}%.matched"
      },
      {
        source      = "${local.set}.delivery"
        destination = "news"
        type        = "queue"
        routing_key = "${local.any_delay}%.news"
      },
      {
        source      = "${local.set}.delivery"
        destination = "orders"
        type        = "queue"
        routing_key = "${local.any_delay}%.orders"
      },
      {
        source      = "${local.set}.delivery"
        destination = "parcels"
        type        = "queue"
        routing_key = "${local.any_delay}%.parcels"
      },
      {
        source      = "${local.set}.delivery"
        destination = "celery"
        type        = "queue"
        routing_key = "${local.any_delay}%celery.celery"
      },
      {
        source      = "${local.set}.delivery"
        destination = "orders"
        type        = "queue"
        routing_key = "${local.any_delay}%shop.orders.#"
      },
      {
        source      = "${local.set}.delivery"
        destination = "parcels"
        type        = "queue"
        routing_key = "${local.any_delay}%billing.a \"$${quoted}\" key%25"
      },
      {
        source      = "${local.set}.delivery"
        destination = "parcels"
        type        = "queue"
        routing_key = "${local.any_delay}%shop.*.parcel"
      },
    ],
  )
}

resource "rabbitmq_exchange" "delay" {
  for_each = local.exchanges

  name  = each.key
  vhost = var.vhost

  settings {
    type        = each.value.type
    durable     = true
    auto_delete = false
    arguments   = each.value.arguments
  }
}

resource "rabbitmq_queue" "delay" {
  for_each = local.queues

  name  = each.key
  vhost = var.vhost

  settings {
    durable        = true
    auto_delete    = false
    arguments_json = jsonencode(each.value)
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "rabbitmq_binding" "delay" {
  for_each = {
    for binding in local.bindings :
    "${binding.source} ${binding.destination} ${binding.routing_key}" => binding
  }

  source           = each.value.source
  vhost            = var.vhost
  destination      = each.value.destination
  destination_type = each.value.type
  routing_key      = each.value.routing_key

  depends_on = [rabbitmq_exchange.delay, rabbitmq_queue.delay, rabbitmq_queue.own]
}

# Last, because by these producers and workers know that all the rest is there.
resource "rabbitmq_exchange" "ready" {
  for_each = toset(["${local.set}.ready"])

  name  = each.key
  vhost = var.vhost

  settings {
    type        = "fanout"
    durable     = true
    auto_delete = false
  }

  depends_on = [rabbitmq_binding.delay]
}

# The app's own queues, as Celery would declare them.

resource "rabbitmq_exchange" "own" {
  for_each = {
    "celery"   = { type = "direct", arguments = {} }
    "matching" = { type = "headers", arguments = {} }
    "news"     = { type = "fanout", arguments = {} }
    "shop"     = { type = "topic", arguments = {} }
    "billing"  = { type = "direct", arguments = {} }
  }

  name  = each.key
  vhost = var.vhost

  settings {
    type        = each.value.type
    durable     = true
    auto_delete = false
    arguments   = each.value.arguments
  }
}

resource "rabbitmq_queue" "own" {
  for_each = {
    "celery" = {}
    "few" = {
      "x-overflow"   = "reject-publish"
      "x-max-length" = 2
    }
    "matched" = {}
    "news" = {}
    "orders" = {
      "x-queue-type" = "quorum"
    }
    "parcels" = {}
  }

  name  = each.key
  vhost = var.vhost

  settings {
    durable        = true
    auto_delete    = false
    arguments_json = jsonencode(each.value)
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "rabbitmq_binding" "own" {
  for_each = {
    for binding in [
      {
        source      = "celery"
        destination = "celery"
        type        = "queue"
        routing_key = "celery"
        arguments   = {}
      },
      {
        source      = "matching"
        destination = "matched"
        type        = "queue"
        routing_key = ""
        arguments   = { "x-match" = "all", "kind" = "parcel" }
      },
      {
        source      = "news"
        destination = "news"
        type        = "queue"
        routing_key = ""
        arguments   = {}
      },
      {
        source      = "shop"
        destination = "orders"
        type        = "queue"
        routing_key = "orders.#"
        arguments   = {}
      },
      {
        source      = "billing"
        destination = "parcels"
        type        = "queue"
        routing_key = "a \"$${quoted}\" key%"
        arguments   = {}
      },
      {
        source      = "shop"
        destination = "parcels"
        type        = "queue"
        routing_key = "*.parcel"
        arguments   = {}
      },
    ] : "${binding.source} ${binding.destination} ${binding.routing_key}" => binding
  }

  source           = each.value.source
  vhost            = var.vhost
  destination      = each.value.destination
  destination_type = each.value.type
  routing_key      = each.value.routing_key
  arguments_json   = jsonencode(each.value.arguments)

  depends_on = [rabbitmq_exchange.own, rabbitmq_queue.own]
}
