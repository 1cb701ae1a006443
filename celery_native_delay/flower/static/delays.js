/* The page Delays. jQuery, DataTables, Bootstrap and moment are Flower's own. */
/*global $, bootstrap, moment, delaysShared */

(function () {
    "use strict";

    var page = document.getElementById("delays-page"),
        urls = page.dataset,
        shared = delaysShared,
        escapeHtml = shared.escapeHtml, isolated = shared.isolated, number = shared.number,
        clock = shared.clock, iso = shared.iso, timeTag = shared.timeTag, duration = shared.duration,
        inWords = shared.inWords, sayWhy = shared.sayWhy, zone = shared.zone,
        toast = shared.toast, post = shared.post,
        mayChange = urls.mayChange === "yes",
        REFRESH_MS = 5000,
        BATCH = 100,
        LISTED = 20,
        SIZES = [15, 30, 50, 100],
        range = null,           // [from, until] in microseconds: the bar that filters
        selected = new Map(),   // of what is shown: id -> name
        allMatch = null,        // ids of everything that matches, if it was asked for
        matching = 0,
        counted = true,         // or there are more
        failed = "",            // why the last search was not answered
        bars = [], drawn = "",  // of the histogram, and what of it is on the page
        told = "",              // the problems that are on the page
        heldNow = "",           // the holds that are on the page
        toRelease = null,       // the hold that the dialog is about
        HELD = {hold: "is held", drop: "is thrown away", release: "is being released", ended: "was held"},
        stop = 0,               // the bar that Tab leads to
        address = "",           // the query string that says what is shown
        table;

    function byId(id) {
        return document.getElementById("delays-" + id);
    }

    function plural(count) {
        return number(count) + (count === 1 ? " task" : " tasks");
    }

    // ---- cards, histogram, levels ---------------------------------------------------------

    function showNumbers(found) {
        byId("waiting").textContent = number(found.waiting);
        var next = found.next_due_us ? inWords(found.next_due_us) :
            (found.next_due_within_seconds ? "within " + duration(found.next_due_within_seconds) : "\u2014");
        byId("next").textContent = next.replace(/^in /, "");
        $(byId("next")).toggleClass("is-within", /^within/.test(next));
        byId("levels-next").textContent = next;
        byId("next").title = found.next_due_us ? iso(found.next_due_us) : "";
        byId("overdue").textContent = number(found.overdue);
        byId("parked").textContent = number(found.parked);
        $(byId("overdue-card")).toggleClass("metric-card-danger", Boolean(found.overdue));
        $(byId("parked-card")).toggleClass("metric-card-danger", Boolean(found.parked));
        $(byId("show-parked")).toggleClass("d-none", !found.parked);
        $(byId("error")).toggleClass("d-none", !found.error).text(found.error || "");
        showProblems(found.problems);
        showHolds(found.holds);
        $(byId("list")).add(byId("histogram-panel")).toggleClass("d-none", Boolean(found.error));
        showHistogram(found.histogram);
        showLevels(found.levels);
    }

    // A screen reader reads the list again when it changes.
    function showProblems(problems) {
        var list = byId("problems"), made = JSON.stringify(problems);
        if (told === (told = made)) {
            return;
        }
        $(list).toggleClass("d-none", !problems.length).empty().append(problems.map(function (each) {
            return $("<li>").text(shared.visible(each.problem)).append($("<small>").text(shared.visible(each.remedy)));
        }));
    }

    // ---- holds ----------------------------------------------------------------------------

    function showHolds(holds) {
        var list = byId("holds");
        if (heldNow === (heldNow = JSON.stringify(holds))) {
            return;
        }
        $(list).toggleClass("d-none", !holds.length).empty().append(holds.map(function (hold) {
            var times = [["since", hold.since], ["until", hold.until]].map(function (each) {
                return each[1] ? " " + each[0] + " " + timeTag(Date.parse(each[1]) * 1000) : "";
            });
            return $("<li>").html("<strong>" + isolated(hold.name) + "</strong> " + HELD[hold.mode] +
                (hold.by ? " by " + isolated(hold.by) : "") + times.join("") +
                (hold.held ? ": " + plural(hold.held) + (hold.held === 1 ? " waits " : " wait ") : " "))
                .append(mayChange ? $('<button type="button" class="btn btn-sm btn-danger">Release\u2026</button>')
                    .on("click", function () { askHold(hold); }) : "");
        }));
    }

    function askHold(hold) {
        var fields = $(".delays-hold-field");
        toRelease = hold;
        document.getElementById("delays-hold-form").reset();
        byId("hold-title").innerHTML = hold ? "Release " + isolated(hold.name) + "?" : "Hold tasks";
        byId("hold-consequence").textContent = hold ? "The tasks that wait run, oldest first." :
            "Within five seconds, workers start no more of these tasks. What runs goes on.";
        fields.toggleClass("d-none", Boolean(hold)).last().toggleClass("d-none", !hold);
        $(byId("hold-drop")).toggleClass("d-none", Boolean(hold));
        $(byId("hold-yes")).text(hold ? "Release" : "Hold");
        byId("hold-error").textContent = "";
        bootstrap.Modal.getOrCreateInstance(byId("hold-dialog")).show();
    }

    function changeHold(event) {
        var by = event.originalEvent.submitter, verb = toRelease ? "release" : by ? by.value : "hold", body = {},
            buttons = $("#delays-hold-form .modal-footer button");
        event.preventDefault();
        ["task", "key", "search", "for", "rate"].forEach(function (name) {
            body[name] = byId("hold-" + name).value.trim() || null;
        });
        body = $.extend(body, toRelease && {task: toRelease.task, key: toRelease.key, search: toRelease.search});
        buttons.prop("disabled", true);
        post(verb, body).done(function (answer) {
            bootstrap.Modal.getOrCreateInstance(byId("hold-dialog")).hide();
            toast(answer.message, "success");
        }).fail(function (xhr) {
            byId("hold-error").textContent = sayWhy(xhr);
        }).always(function () {
            buttons.prop("disabled", false);
            refresh();
        });
    }

    // The end of the scale: one digit and zeros, which is at least *most*.
    function roundUp(most) {
        var ten = Math.pow(10, Math.floor(Math.log10(most)));
        return [1, 2, 3, 4, 6, 8, 10].map(function (step) { return step * ten; }).find(function (end) { return end >= most; });
    }

    function showHistogram(found) {
        var most = roundUp(Math.max.apply(null, [1].concat(found.map(function (bar) { return bar[2]; })))),
            middle = found.length && found[Math.floor(found.length / 2)][0],
            box = byId("histogram"),
            focused = box.contains(document.activeElement);
        bars = found;
        if (drawn === (drawn = JSON.stringify([found, range]))) {
            return;
        }
        $(box).empty().append(found.map(function (bar) {
            var label = plural(bar[2]) + " due from " + clock(bar[0]) + " until " + clock(bar[1]),
                height = bar[2] ? Math.max(3, Math.round(bar[2] / most * 100)) : 0,
                pressed = range !== null && range[0] === bar[0] && range[1] === bar[1];
            return $('<button type="button" class="delays-bar">')
                .attr({"aria-label": label, title: label, "aria-pressed": pressed})
                .append($("<span>").css("height", height + "%"))
                .on("click", function () { filterTimes(pressed ? null : [bar[0], bar[1]]); });
        }));
        stopAt(stop, focused);
        $(byId("scale")).empty().append([most, most / 2, 0].map(function (count) {
            return $("<span>").text(count % 1 ? "" : number(count));
        }));
        $(byId("middle")).html(found.length > 2 ? timeTag(middle) : "");
        $(byId("from")).html(found.length ? timeTag(found[0][0]) : "");
        $(byId("until")).html(found.length ? timeTag(found[found.length - 1][1]) : "Nothing waits");
    }

    // One of the bars is a stop of Tab; the arrows lead to the others.
    function stopAt(index, focus) {
        var all = $(byId("histogram")).children();
        stop = Math.max(0, Math.min(index, all.length - 1));
        all.attr("tabindex", function (place) { return place === stop ? 0 : -1; });
        if (focus) {
            all.eq(stop).trigger("focus");
        }
    }

    function moveStop(event) {
        var to = {ArrowRight: stop + 1, ArrowLeft: stop - 1, Home: 0, End: bars.length - 1}[event.key];
        if (to !== undefined) {
            event.preventDefault();
            stopAt(to, true);
        }
    }

    function showLevels(levels) {
        var most = Math.max.apply(null, [1].concat(levels.map(function (level) { return level.waiting; })));
        $(byId("levels-panel")).toggleClass("d-none", !levels.length);
        $(".delays-pictures").toggleClass("has-levels",
            levels.length > 0 && !$(byId("histogram-panel")).hasClass("d-none"));
        $(byId("levels")).empty().append(levels.slice().reverse().map(function (level) {
            var stuck = level.stuck ? ", " + number(level.stuck) + " stuck" : "";
            return $("<li>").toggleClass("is-stuck", Boolean(level.stuck))
                .attr("title", "Delay queue of " + duration(level.ttl_seconds) + ": " + plural(level.waiting) + stuck)
                .append($("<span>").text(duration(level.ttl_seconds)))
                .append($('<span class="delays-depth">').css("width", level.waiting / most * 100 + "%"))
                .append($("<span>").text(number(level.waiting)));
        }));
    }

    var parked = null;          // how many were shown

    function sure(is) {
        $(byId("parked-choice")).toggleClass("d-none", is);
        $(byId("parked-sure")).toggleClass("d-none", !is);
        if (is) {
            byId("purge-question").textContent = "Delete " + plural(parked) + "? This cannot be undone.";
            byId("purge-no").focus();
        } else {
            byId("requeue").focus();
        }
    }

    function changeParked(verb, body, done) {
        var buttons = $("#delays-parked-dialog .modal-footer button").prop("disabled", true);
        post(verb, body).done(function (answer) {
            toast(done(answer), "success");
        }).fail(function (xhr) {
            toast(sayWhy(xhr), "danger");
        }).always(function () {
            buttons.prop("disabled", false);
            refresh();
            table.ajax.reload(null, false);
            showParked();
        });
    }

    function showParked() {
        $.getJSON(urls.parked).done(function (answer) {
            var list = $(byId("parked-list")).empty(),
                dialog = bootstrap.Modal.getOrCreateInstance(document.getElementById("delays-parked-dialog"));
            parked = answer.total;
            if (parked === 0) {
                dialog.hide();
                return;
            }
            if (mayChange) {
                sure(false);
                $(byId("purge")).prop("disabled", parked === null);
            }
            if (answer.tasks === null) {
                list.append($("<li>").text("A worker is delivering them right now."));
            }
            (answer.tasks || []).forEach(function (task) {
                var where = [task.exchange, task.routing_key].filter(Boolean).map(isolated).join(" \u2192 "),
                    due = task.due ? ", due " + timeTag(Date.parse(task.due) * 1000) : "";
                list.append("<li>" + isolated(task.task || "(no task)") + " " + isolated(task.id) +
                    "<small>to " + (where || "an unknown queue") + due + "</small></li>");
            });
            if (answer.tasks && parked > answer.tasks.length) {
                list.append($("<li>").text("and " + number(parked - answer.tasks.length) + " more"));
            }
            dialog.show();
        }).fail(function (xhr) { toast(sayWhy(xhr), "danger"); });
    }

    function showStory(task) {
        $.getJSON(urls.story, {id: task.id}).done(function (answer) {
            byId("story-title").innerHTML = isolated(task.name || "(no task)") + " " + isolated(task.id);
            $(byId("story-list")).empty().append(answer.story.map(function (said) {
                return $("<li>").text(shared.visible(said));
            }));
            bootstrap.Modal.getOrCreateInstance(byId("story-dialog")).show();
        }).fail(function (xhr) { toast(sayWhy(xhr), "danger"); });
    }

    function showRange() {
        $(byId("filter")).toggleClass("d-none", range === null);
        $(byId("filter-text")).html(range ? "Due from " + timeTag(range[0]) + " until " + timeTag(range[1]) : "");
        if (drawn) {
            showHistogram(bars);
        }
    }

    function filterTimes(wanted) {
        range = wanted;
        showRange();
        unselect();
        table.ajax.reload();
    }

    // ---- the address ----------------------------------------------------------------------

    function ofAddress() {
        var found = new URLSearchParams(location.search), us = ["from_us", "until_us"].map(function (name) {
                return /^\d{1,17}$/.test(found.get(name)) ? Number(found.get(name)) : null;
            }), limit = Number(found.get("limit"));
        limit = SIZES.indexOf(limit) < 0 ? SIZES[0] : limit;
        range = us.indexOf(null) < 0 ? us : null;
        return {search: found.get("search") || "", limit: limit,
            offset: Math.max(0, Math.floor((parseInt(found.get("offset"), 10) || 0) / limit) * limit)};
    }

    // One step back for each change; for a search that is being typed, one in all.
    function toAddress(search, offset, limit) {
        var typed = document.activeElement === searchBox(), before = address;
        address = $.param($.extend(search ? {search: search} : {}, offset > 0 ? {offset: offset} : {},
            limit !== SIZES[0] ? {limit: limit} : {}, range ? {from_us: range[0], until_us: range[1]} : {}));
        if (address !== before) {
            history[typed && history.state === "typed" ? "replaceState" : "pushState"](typed ? "typed" : "",
                "", location.pathname + (address && "?" + address));
        }
    }

    function goToAddress() {
        var wanted = ofAddress(), settings = table.settings()[0];
        address = location.search.slice(1);
        unselect();
        showRange();
        searchBox().value = wanted.search;
        table.search(wanted.search).page.len(wanted.limit);
        settings._iDisplayStart = wanted.offset;
        table.draw("page");
    }

    function searchBox() {
        return document.querySelector("#delays-table_filter input");
    }

    function refresh() {
        return $.getJSON(urls.summary).done(function (found) {
            showNumbers(found);
            shared.live(true);
        }).fail(function (xhr) {
            shared.live(false);
            $(byId("error")).removeClass("d-none").text(sayWhy(xhr));
        });
    }

    // ---- table and selection --------------------------------------------------------------

    function given(task) {
        return task.kwargs && task.kwargs !== "{}" ? task.args + " " + task.kwargs : task.args;
    }

    function columns() {
        return [{
            data: "id", visible: mayChange, width: "1%", className: "delays-pick",
            render: function (id, type, task) {
                return '<input type="checkbox" class="form-check-input delays-box" aria-label="Select ' +
                    escapeHtml(task.name + " " + id) + '"' +
                    (isSelected(task) ? " checked" : "") + ">";
            }
        }, {
            data: "due_us", className: "delays-due",
            render: function (us, type, task) {
                var late = us / 1000 < Date.now() ? ' class="is-overdue"' : "";
                if (task.held) {
                    return timeTag(us, '<span class="is-overdue" title="' + escapeHtml(task.held) + '">held</span> ');
                }
                return timeTag(us, "<span" + late + ">" + inWords(us) + "</span> ");
            }
        }, {
            data: "name", className: "delays-name",
            render: function (name, type, task) {
                var key = task.key && "<small>" + isolated(task.kind) + " " + isolated(task.key) + "</small>";
                return isolated(name || "(no task)") + key;
            }
        }, {
            data: "id", className: "delays-id",
            render: function (id) {
                var prefix = $("#url_prefix").val();
                prefix = prefix ? "/" + prefix.replace(/^\/+|\/+$/g, "") : "";
                return '<a href="' + prefix + "/task/" + encodeURIComponent(id) + '" title="' +
                    escapeHtml(id) + '"><code><bdi>' + escapeHtml(id) + "</bdi></code></a>" +
                    ' <button type="button" class="btn btn-sm btn-link p-0" data-why aria-label="What is known of ' +
                    escapeHtml(id) + '">why?</button>';
            }
        }, {
            data: "args", className: "delays-args",
            render: function (args, type, task) {
                return '<bdi title="' + escapeHtml(given(task)) + '">' + escapeHtml(given(task)) + "</bdi>";
            }
        }, {
            data: "queue", className: "delays-queue",
            render: function (queue, type, task) {
                return queue ? isolated(queue) : isolated(task.exchange) + " \u2192 " + isolated(task.routing_key);
            }
        }, {
            data: "id", visible: mayChange, width: "1%", className: "delays-change text-end",
            render: function (id, type, task) {
                return '<div class="dropdown"><button type="button" class="btn btn-sm btn-link' +
                    ' delays-more" data-bs-toggle="dropdown" aria-expanded="false"' +
                    ' data-bs-popper-config=\'{"strategy":"fixed"}\' aria-label="Change ' +
                    escapeHtml(task.name + " " + id) + '">&#8943;</button>' +
                    '<ul class="dropdown-menu dropdown-menu-end">' +
                    [["run-now", "Run now"], ["reschedule", "Reschedule\u2026"], ["cancel", "Cancel\u2026"]]
                        .map(function (item) {
                            return '<li><button type="button" class="dropdown-item" data-one="' + item[0] +
                                '">' + item[1] + "</button></li>";
                        }).join("") + "</ul></div>";
            }
        }];
    }

    function asked() {
        var what = {search: table.search()};
        if (range) {
            what.from_us = range[0];
            what.until_us = range[1];
        }
        return what;
    }

    function shown() {
        return table.rows().data().toArray();
    }

    function isSelected(task) {
        return (allMatch || selected).has(task.id);
    }

    function showSelection() {
        var count = (allMatch || selected).size,
            rows = shown(),
            whole = rows.length > 0 && rows.every(isSelected);
        if (!mayChange) {
            return;
        }
        byId("selected").textContent = count ? plural(count) + " selected" : "None selected";
        $(byId("all")).toggleClass("d-none", !whole || allMatch !== null || matching <= rows.length)
            .text("Select all " + (counted ? number(matching) + " " : "") + "that match");
        $("[data-change]").prop("disabled", !count);
        byId("page-box").checked = whole;
        byId("page-box").indeterminate = count > 0 && !whole;
    }

    function unselect() {
        selected.clear();
        allMatch = null;
        $(".delays-box").prop("checked", false);
        showSelection();
    }

    function select(id, name, on) {
        if (allMatch) {         // from now on one by one
            allMatch.forEach(function (value, key) { selected.set(key, value); });
            allMatch = null;
        }
        if (on) {
            selected.set(id, name);
        } else {
            selected.delete(id);
        }
        showSelection();
    }

    // ---- changing -------------------------------------------------------------------------

    var VERBS = {
        "cancel": {
            consequence: ["It will never run; its result becomes REVOKED. This cannot be undone.",
                "They will never run; their results become REVOKED. This cannot be undone."],
            yes: function (what) { return "Cancel " + what; }, done: "cancelled", kind: "btn-danger"
        },
        "reschedule": {
            consequence: ["It becomes due at this time.",
                "All of them become due at the same time. +2 h keeps their spacing."],
            yes: function (what) { return "Reschedule " + what; }, done: "rescheduled", kind: "btn-primary"
        },
        "run-now": {
            consequence: ["It goes to its queue at once.", "They go to their queues at once."],
            yes: function (what) { return "Run " + what + " now"; }, done: "due now", kind: "btn-primary"
        }
    }, dialog, wanted = null, busy = false;

    function ask(verb, tasks) {
        var what = plural(tasks.size), words = VERBS[verb];
        wanted = {verb: verb, tasks: tasks};
        byId("question").textContent = words.yes(what) + "?";
        byId("consequence").textContent = words.consequence[tasks.size === 1 ? 0 : 1];
        byId("when-error").textContent = "";
        $(byId("when")).toggleClass("d-none", verb !== "reschedule");
        byId("form").reset();
        $(byId("yes")).text(words.yes(what)).removeClass("btn-danger btn-primary").addClass(words.kind)
            .prop("disabled", false);
        $(byId("chosen")).empty().append(Array.from(tasks).slice(0, LISTED).map(function (task) {
            return "<li>" + (task[1] ? isolated(task[1]) + " " : "") + isolated(task[0]) + "</li>";
        }));
        if (tasks.size > LISTED) {
            $(byId("chosen")).append($("<li>").text("and " + number(tasks.size - LISTED) + " more"));
        }
        $(byId("progress")).addClass("d-none");
        dialog.show();
    }

    function change(verb, ids, when) {
        var done = 0, refused = 0, start = 0;
        function next() {
            if (start >= ids.length) {
                return $.Deferred().resolve(done, refused);
            }
            return post(verb, $.extend({ids: ids.slice(start, start + BATCH)}, when)).then(function (answer) {
                done += answer.done;
                refused += answer.outcomes.length - answer.done;
                start += BATCH;
                $(byId("progress")).attr({"aria-valuemax": ids.length, "aria-valuenow": Math.min(start, ids.length)})
                    .find(".progress-bar").css("width", Math.min(100, start / ids.length * 100) + "%");
                return next();
            });
        }
        return next().then(null, function (xhr) {
            return $.Deferred().reject(xhr, done);
        });
    }

    function confirmed(event) {
        var words = VERBS[wanted.verb], ids = Array.from(wanted.tasks.keys()), when = {};
        event.preventDefault();
        if (busy) {
            return;
        }
        if (wanted.verb === "reschedule") {
            when = {when: byId("at").value.trim()};
            if (!when.when) {
                byId("when-error").textContent = "Say when, such as 2 h.";
                byId("at").focus();
                return;
            }
        }
        busy = true;
        byId("when-error").textContent = "";
        $(byId("yes")).prop("disabled", true);
        $(byId("progress")).toggleClass("d-none", ids.length <= BATCH);
        change(wanted.verb, ids, when).then(function (done, refused) {
            toast(plural(done) + " " + words.done + (refused ? ", " + number(refused) + " could not be" : ""),
                refused && !done ? "danger" : "success");
        }, function (xhr, done) {
            if (xhr.status === 400 && !done && when.when) {     // what was written can be corrected
                byId("when-error").textContent = sayWhy(xhr);
                return;
            }
            toast(sayWhy(xhr) + (done ? " (" + plural(done) + " " + words.done + " before)" : ""), "danger");
        }).always(function () {
            busy = false;
            if (byId("when-error").textContent) {
                $(byId("yes")).prop("disabled", false);
                byId("at").focus();
                return;
            }
            dialog.hide();
            unselect();
            refresh();
            table.ajax.reload(null, false);
        });
    }

    // ---- it starts ------------------------------------------------------------------------

    $(function () {
        var first = ofAddress();
        address = location.search.slice(1);
        showRange();
        table = $("#delays-table").DataTable({
            rowId: "delivery_id",
            searching: true, searchDelay: 300, ordering: false, autoWidth: false,
            processing: true, serverSide: true,
            dom: "frt<'dt-footer'lip>",
            lengthMenu: SIZES, pageLength: first.limit, displayStart: first.offset,
            search: {search: first.search},
            language: {
                lengthMenu: "_MENU_",
                info: "Showing _START_ to _END_ of _TOTAL_ tasks",
                infoEmpty: "No tasks to show",
                infoFiltered: "(filtered from _MAX_ waiting tasks)",
                search: '<span class="visually-hidden">Search delayed tasks</span>',
                searchPlaceholder: "name:shop.remind queue:emails kwargs:order=42",
                emptyTable: "No task waits.",
                zeroRecords: "No waiting task matches."
            },
            ajax: {
                url: urls.table,
                data: function (sent) {
                    var what = {draw: sent.draw, start: sent.start, length: sent.length,
                        "search[value]": sent.search.value};
                    if (table) {        // not for what the address itself asks for
                        toAddress(sent.search.value, sent.start, sent.length);
                    }
                    return range ? $.extend(what, {from_us: range[0], until_us: range[1]}) : what;
                },
                dataSrc: function (answer) {
                    $(byId("search-error")).toggleClass("d-none", !answer.searchError)
                        .text(answer.searchError || "");
                    searchBox().setAttribute("aria-invalid", Boolean(answer.searchError));
                    matching = answer.recordsFiltered;
                    counted = answer.counted !== false;
                    failed = answer.unavailable || (answer.searchError ? "Nothing to show." : "");
                    return answer.data;
                }
            },
            initComplete: function () {
                $("#delays-table_length select").attr("aria-label", "Tasks per page");
                $(byId("search-error")).insertAfter("#delays-table_filter");
                $(searchBox()).attr("aria-describedby", "delays-search-error");
                $(".delays-toolbar").insertAfter("#delays-search-error");
            },
            infoCallback: function (settings, start, end, max, total, text) {
                return counted ? text : text.replace(/ of ([\d,]+) tasks/, " of more than $1 tasks");
            },
            preDrawCallback: shared.noteFocus,
            drawCallback: function () {
                shared.giveFocusBack();
                if (failed) {
                    $("#delays-table .dataTables_empty").text(failed);
                } else if (matching && !shown().length) {   // they have come to an end before this page
                    setTimeout(function () { table.page("last").draw("page"); });
                }
                showSelection();
            },
            columns: columns()
        });
        table.on("search.dt", function () { unselect(); });
        table.on("page.dt", function () { unselect(); });
        byId("when-help").textContent = "2 h: from now. +2 h: later than it is due. Or tomorrow 09:00, or " +
            moment.tz(zone).format("YYYY-MM-DD HH:mm") + ", in " + zone + ".";
        dialog = new bootstrap.Modal(document.getElementById("delays-dialog"));
        document.getElementById("delays-dialog").addEventListener("shown.bs.modal", function () {
            (wanted.verb === "reschedule" ? byId("at") : byId("no")).focus();
        });
        document.querySelectorAll(".modal").forEach(function (modal) {
            var opener = null;
            modal.addEventListener("show.bs.modal", function () { opener = document.activeElement; });
            modal.addEventListener("hidden.bs.modal", function () {
                var back = opener && opener.isConnected && opener.offsetParent && !opener.disabled;
                (back ? opener : searchBox()).focus();
            });
        });
        $("#delays-form").on("submit", confirmed);
        $("#delays-hold").on("click", function () { askHold(null); });
        $("#delays-hold-form").on("submit", changeHold);
        $("#delays-hold-dialog").on("shown.bs.modal", function () {
            byId(toRelease ? "hold-rate" : "hold-task").focus();
        });
        $("#delays-show-parked").on("click", showParked);
        $("#delays-requeue").on("click", function () {
            changeParked("requeue", {}, function (answer) { return answer.message; });
        });
        $("#delays-purge").on("click", function () { sure(true); });
        $("#delays-purge-no").on("click", function () { sure(false); });
        $("#delays-purge-yes").on("click", function () {
            changeParked("purge", {parked: parked}, function (answer) {
                return plural(answer.purged) + " deleted";
            });
        });
        document.getElementById("delays-parked-dialog").addEventListener("shown.bs.modal", function () {
            if (mayChange) {
                byId("requeue").focus();
            }
        });
        $("#delays-histogram").on("keydown", moveStop).on("focusin", function (event) {
            stopAt($(event.target).index());
        });
        window.addEventListener("popstate", goToAddress);
        $("#delays-filter-clear").on("click", function () { filterTimes(null); });
        $("#delays-table").on("change", ".delays-box", function () {
            var task = table.row($(this).closest("tr")).data();
            select(task.id, task.name, this.checked);
        });
        $("#delays-page-box").on("change", function () {
            var on = this.checked;
            shown().forEach(function (task) { select(task.id, task.name, on); });
            $(".delays-box").prop("checked", on);
        });
        $("#delays-all").on("click", function () {
            $.getJSON(urls.ids, asked()).done(function (answer) {
                selected.clear();
                allMatch = new Map(answer.ids.map(function (id) { return [id, ""]; }));
                showSelection();
                $("[data-change=run-now]").trigger("focus");
            }).fail(function (xhr) { toast(sayWhy(xhr), "danger"); });
        });
        $("[data-change]").on("click", function () {
            ask(this.dataset.change, new Map(allMatch || selected));
        });
        $("#delays-table").on("click", "[data-why]", function () {
            showStory(table.row($(this).closest("tr")).data());
        });
        $("#delays-table").on("click", "[data-one]", function () {
            var task = table.row($(this).closest("tr")).data();
            ask(this.dataset.one, new Map([[task.id, task.name]]));
        });

        (function again() {
            refresh().always(function () { setTimeout(again, REFRESH_MS); });
        }());
        setInterval(function () {
            // Under the hands of a user who chooses nothing moves.
            if (!selected.size && !allMatch && !busy && !$(byId("list")).hasClass("d-none") && !$("#delays-table .dropdown-menu.show").length) {
                table.ajax.reload(null, false);
            }
        }, REFRESH_MS);
    });
}());
